"""The main jobs, shown on sample data that the package makes itself."""
