"""Cells: other installations that run jobs of this one.

``service`` is what operators do with them, ``remote`` is a cell as it is asked over its public API, ``placing`` is the
loop that gives jobs to cells, follows them there and takes back those that wait. Everything that a cell is asked is
written down before, and what it answers afterwards: the loop may be killed anywhere.

A job is given to another installation only if its cell has said that it never started there: no time that passes says
so, since a cell that is cut off may have started it meanwhile.
"""
