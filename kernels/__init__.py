"""Operations on tensors: one dispatch point each, a torch twin for every kernel."""
