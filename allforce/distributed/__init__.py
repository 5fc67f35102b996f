"""The workers of a job: how they were started (launch), how they meet (connect), how they sum (Comm)."""
