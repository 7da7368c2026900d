"""Commands for jobs: submit, watch, explain, and reach into them."""
