"""The properties: one function for each invariant, of a `Subject`; each raises `Violation` with a report."""
