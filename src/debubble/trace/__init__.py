"""Trace files in → columns out (`RankTrace`, `OpTable`). Knows file formats, no pipelines."""
