"""The compose files on a real engine: images, containers that are killed, an upgrade with data, two of everything."""
