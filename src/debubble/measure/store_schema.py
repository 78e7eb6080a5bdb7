"""How the history is laid out, as the steps that lead there: old stores take those they lack."""

from __future__ import annotations

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE store_version (version INTEGER NOT NULL)",
        (
            "CREATE TABLE measurements (id {key}, name TEXT NOT NULL, "
            "created_s DOUBLE PRECISION NOT NULL, data TEXT NOT NULL)"
        ),
        "CREATE INDEX measurements_by_name ON measurements (name)",
    ),
    (
        (
            "CREATE TABLE tags (measurement_id INTEGER NOT NULL, name TEXT NOT NULL, "
            "value TEXT NOT NULL, PRIMARY KEY (measurement_id, name))"
        ),
    ),
)
VERSION = len(MIGRATIONS)
