"""What is run in a checkout and is no part of the product: sets it up, shows it, makes checked-in files from code."""
