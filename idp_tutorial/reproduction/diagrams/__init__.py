"""Pictures of methods and of records."""
