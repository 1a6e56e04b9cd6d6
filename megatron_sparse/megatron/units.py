"""Keeps residuals in the unit of the gradients that they are added to.

A gradient in a bucket is a multiple of the true one: by the *loss scale*, which in fp16 changes
after some steps, and with a loss per token also by the step's tokens. After the sum,
`finalize_model_grads` multiplies by *Megatron's factor*, one over the tokens. Residuals are
converted after each step in which one of the two has changed. Where a step has so few tokens that
old residuals would outweigh its gradients, they are taken out of its sums (`Attachment`).
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.optimizer_step import WrappedMethod, parts_of

FEW_TOKENS = 0.5
"""A step with less than this share of the last step's tokens has few."""


class ResidualUnit:
    """Tracks the loss scale and Megatron's factor in one process.

    Wraps `scale_gradients` of the chunks whose loss is per token, until `close`.

    Args:
        chunks: Megatron's DDP-wrapped model chunks.
        on_few_tokens: called before the sums of a step with few tokens are multiplied by their
            factor.

    Attributes:
        loss_scale: of the residuals; None without loss scaling.
        gradient_factor: Megatron's factor for the sum of the last accepted step, a scalar on the
            device; None if it uses none.
    """

    def __init__(self, chunks: Iterable[Any], on_few_tokens: Callable[[], None]) -> None:
        self._on_few_tokens = on_few_tokens
        self.loss_scale: float | None = None
        self.gradient_factor: torch.Tensor | None = None
        # The factor of the current step, which the optimizer may yet skip.
        self._new_factor: torch.Tensor | None = None
        self._optimizer: Any = None  # set by `bind`
        self._wrapped: list[WrappedMethod] = []
        for chunk in filter(divides_by_tokens, chunks):
            scale = partial(self._scale_gradients, is_first=not self._wrapped)
            self._wrapped.append(WrappedMethod(chunk, "scale_gradients", scale))

    @property
    def per_token(self) -> bool:
        """Whether the gradient factor may change from step to step."""
        return bool(self._wrapped)

    def bind(self, optimizer: Any) -> None:
        """Reads the loss scale of `optimizer` from now on."""
        self._optimizer = optimizer
        self.loss_scale = self._read_loss_scale()

    def _scale_gradients(
        self, original: Callable[[torch.Tensor], None], factor: torch.Tensor, *, is_first: bool
    ) -> None:
        """Called for a chunk's `scale_gradients`: stores the factor, then applies it.

        All chunks have the same factor, so only the first one checks for a step with few tokens.
        """
        self._new_factor = factor
        if is_first and self._has_few_tokens(float(factor)):
            self._on_few_tokens()
        original(factor)

    def _has_few_tokens(self, factor: float) -> bool:
        """Whether this step has so few tokens that old residuals would outweigh its gradients.

        `factor` is one over the step's tokens.
        """
        if factor >= 1.0:  # a single token, or none: Megatron then divides by 1
            return True
        before = self.gradient_factor
        return before is not None and float(before) < FEW_TOKENS * factor

    def end_step(self, accepted: bool) -> torch.Tensor | None:
        """Ends a step: stores its factor if the optimizer accepted it.

        Returns:
            What to multiply residuals by: old factor / new factor, an fp64 scalar on the device;
            None if there is no old or no new factor.
        """
        old, new, self._new_factor = self.gradient_factor, self._new_factor, None
        if new is None or not accepted:
            return None
        self.gradient_factor = new
        return None if old is None else old.to(new.device, torch.float64) / new

    def follow_loss_scale(self) -> float | None:
        """Reads and stores the optimizer's loss scale.

        Returns:
            What to multiply residuals by: new scale / old scale; None if it has not changed.
        """
        old, self.loss_scale = self.loss_scale, self._read_loss_scale()
        if old == self.loss_scale:
            return None
        return (self.loss_scale or 1.0) / (old or 1.0)

    def restore(self, loss_scale: float | None, gradient_factor: float | None) -> float | None:
        """Sets the unit for residuals from a checkpoint, whose run may have had another unit.

        Args:
            loss_scale: of the run that saved; None without loss scaling.
            gradient_factor: Megatron's factor in that run; None if it had none.

        Returns:
            What to multiply the loaded residuals by now; None if by nothing.
        """
        self.loss_scale = loss_scale
        change = self.follow_loss_scale()
        if self.per_token:
            # `end_step` converts residuals. 1: without a factor their unit is the final gradient's.
            self.gradient_factor = torch.tensor(gradient_factor or 1.0, dtype=torch.float64)
        elif gradient_factor is not None:  # this run multiplies its sums by no factor
            change = (change or 1.0) * gradient_factor
        return change

    def of_gradient(self) -> float:
        """Returns the factor from a residual's unit to that of the optimizer's gradient.

        Copies Megatron's factor from the device to the host.
        """
        factor = 1.0 if self.gradient_factor is None else float(self.gradient_factor)
        return factor / (self.loss_scale or 1.0)

    def _read_loss_scale(self) -> float | None:
        return float(self._optimizer.get_loss_scale()) if scales_loss(self._optimizer) else None

    def close(self) -> None:
        """Gives the chunks their own method back."""
        for wrapped in self._wrapped:
            wrapped.close()


def check_undo(compression: CompressionConfig, *, undo: bool) -> None:
    """Refuses settings with which skipped steps or varying tokens would corrupt residuals.

    Args:
        compression: the configuration.
        undo: whether a step can be skipped or repeated, or the loss is divided by its tokens.

    Raises:
        ConfigError: names the setting.
    """
    if undo and compression.undo == "never":
        raise ConfigError(
            "compression.undo=never, but steps may be skipped or repeated, or tokens vary",
            expected="fp32 or bf16 training with --rerun-mode disabled, no loss per token and no "
            "grad_norm_skip_threshold",
            got="loss scaling, Megatron's rerun mode, --calculate-per-token-loss or "
            "grad_norm_skip_threshold",
            remedy="set compression.undo=auto, or megatron.rerun_mode=disabled",
        )


def is_fp16(owner: Any) -> bool:
    """Whether an optimizer or a model chunk trains in fp16, with loss scaling."""
    return bool(getattr(getattr(owner, "config", None), "fp16", False))


def scales_loss(optimizer: Any) -> bool:
    """Whether the loss is scaled, and so steps with NaN or Inf are skipped.

    In fp16, or if an optimizer takes a static `--loss-scale`: the unsharded fp32 one ignores it.
    """
    return any(
        is_fp16(part) or getattr(part, "grad_scaler", None) is not None
        for part in parts_of(optimizer)
    )


def divides_by_tokens(chunk: Any) -> bool:
    """Whether Megatron divides the summed gradient by the step's number of tokens."""
    return bool(getattr(getattr(chunk, "config", None), "calculate_per_token_loss", False))


def may_repeat_or_skip(optimizer: Any) -> bool:
    """Whether steps can be repeated (Megatron's rerun mode) or skipped.

    An optimizer skips steps with loss scaling, or with a finite `grad_norm_skip_threshold`
    (Megatron 0.18 and later). If one of chained optimizers skips, all do.
    """
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    def has_limit(single: Any) -> bool:
        config = getattr(single, "config", None)
        return math.isfinite(getattr(config, "grad_norm_skip_threshold", math.inf))

    if get_rerun_state_machine().get_mode() is not RerunMode.DISABLED:
        return True
    return scales_loss(optimizer) or any(map(has_limit, parts_of(optimizer)))
