"""What passes and hops take, and what ranks may hold, in → an order that nobody has named."""
