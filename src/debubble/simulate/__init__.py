"""Orders and costs, or a measured step, in → when everything happens, as a `Timeline`, out."""
