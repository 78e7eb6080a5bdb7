"""A stream of batches in → its causes, its replay as a closed queue, its levers and its plan."""
