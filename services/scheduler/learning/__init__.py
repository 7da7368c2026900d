"""What the scheduler learns of jobs while they run: speed and power by device control, and predicted lengths."""
