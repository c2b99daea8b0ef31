"""Define the methods that Klear adds to vLLM's worker processes. vLLM imports this module by its name."""

from __future__ import annotations

from klear_core.generate.engine import load_offer


class WorkerExtension:
    """Methods that vLLM adds to its workers, called with `collective_rpc`."""

    def fetch_weights(self, offer: str) -> None:
        """Overwrite the weights in place with those that a learner offers."""
        from klear_core.generate.weight_transfer import fetch

        # `rank` and `reload_weights` are the worker's own; rank 0 of the transfer is the learner
        arriving = fetch(load_offer(offer), rank=1 + self.rank)  # type: ignore[attr-defined]
        self.reload_weights(weights_iterator=arriving)  # type: ignore[attr-defined]

    def digest_offered(self, offer: str) -> str:
        """Fetch offered tensors and return their digest; nothing is loaded."""
        from klear_core.generate.weight_transfer import digest_of, fetch

        return digest_of(fetch(load_offer(offer), rank=1 + self.rank))  # type: ignore[attr-defined]

    def refresh_tied_head(self) -> None:
        """Rebuild a tied head: on CPU it is a packed copy of the embedding, which vLLM's reload skips (in 0.32)."""
        head = getattr(self.model_runner.get_model(), "lm_head", None)  # type: ignore[attr-defined]
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)
