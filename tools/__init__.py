"""What is run in a checkout and is no part of the product: makes checked-in files from the code."""
