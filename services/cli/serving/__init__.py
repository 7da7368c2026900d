"""Commands for what serves: pools, applications, their fleets, and servers that others run."""
