"""Orders of the grid, from the doors by which they come to the rounds that meet them."""
