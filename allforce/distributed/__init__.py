"""The workers of a job: how they were started (launch), how they meet (connect), how they sum (Comm)."""

ENGINES = ("auto", "torch", "mpi", "horovod", "serial")  # what carries data between workers
