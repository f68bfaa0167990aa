"""A model behind HTTP: dynamic batching, a budget per request, and a page that shows where the compute went."""
