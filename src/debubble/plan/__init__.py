"""`Costs` in → what could be changed, what each change would buy, and whether it fits memory."""
