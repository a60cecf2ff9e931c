"""SGLang behind the engine port. Written from SGLang's source and documentation; it has not been run against a real
SGLang server, only against one that behaves as the source says (tests/rollout/sglang/fake)."""
