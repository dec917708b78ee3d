"""Train one configuration, keep its record, and compare methods."""
