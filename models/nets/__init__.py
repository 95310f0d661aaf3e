"""Networks in Flax: a GPT, Llama and its relatives, mixtures of experts, an MLP."""
