"""Between processes of one machine: shared memory and mailboxes. Bytes only, no torch."""
