"""What is measured on a real GPU: programs that run there, and the readings that were kept."""
