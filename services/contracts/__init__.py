"""What the processes exchange with each other and with clients: schemas, stream and header names, problem codes."""
