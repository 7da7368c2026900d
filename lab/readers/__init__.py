"""The job traces of papers that can be read, one module each (``services.simulator.readers.formats.JobFormat``)."""
