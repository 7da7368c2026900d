"""Commands for the ledger: reports, their forms, and the check of an export."""
