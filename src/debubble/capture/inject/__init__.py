"""A folder for PYTHONPATH: what it holds runs at the start of every Python process of a job."""
