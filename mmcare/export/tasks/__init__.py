"""Tasks, a file each."""
