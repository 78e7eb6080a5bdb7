"""Orders and costs, or a measured step, in → when everything happens, as a `Timeline`, out."""

from debubble import let_be_called

let_be_called(__name__)
