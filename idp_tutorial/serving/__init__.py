"""Several tasks on one backbone, answered in joint batches."""
