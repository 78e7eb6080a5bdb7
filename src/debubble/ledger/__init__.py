"""Why each nanosecond of a step was spent, by whom, and what removing a cause would buy."""
