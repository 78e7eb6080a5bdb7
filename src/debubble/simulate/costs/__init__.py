"""`Timeline`s in → what a pass, a transfer, a microbatch in flight costs."""
