"""The models: families (minGRU and minLSTM, HGRN), their base, loading, and backends.

Begin with language_model.py, program.py says what backends compile, registry.py lists the families.
"""
