"""What every process needs and no process owns: settings, logging, the HTTP app, problems, clients, Redis."""
