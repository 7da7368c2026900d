"""What the processes say to each other and to the world: schemas, stream and header names, problem codes."""
