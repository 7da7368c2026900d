"""Commands on what serves: pools, applications, their fleets, and servers that others run."""
