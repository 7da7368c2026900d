"""What the scheduler learns about jobs while they run: speed and power by device control, and predicted lengths."""
