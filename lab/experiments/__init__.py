"""Experiments: policies x traces x zones x signals x seeds, from one file to results that a report can be made of.

``plan`` reads the file and lists the cells, ``cell`` runs one, ``runner`` runs all of them by processes and remembers
which are done, ``bound`` finds the least carbon any schedule could have reached. Results are one JSON file per cell,
named by a hash of what went into it: a second run does only what is missing or has changed.
"""
