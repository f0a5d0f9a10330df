"""States in a store that several servers share: Redis, Valkey or a folder."""
