"""Commands on jobs: submit, watch, explain, and reach into them."""
