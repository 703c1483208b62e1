"""From prompts to the token ids the reward model reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from wan_trainer.rewards.videoalign.prompt import REWARD_TOKENS, VIDEO_TOKEN, question
from wan_trainer.types import Sample, UserError, first_line


class Questions:
    """Writes the question about each video as token ids."""

    def __init__(self, directory: Path, template: str, video_token_id: int, vocabulary: int) -> None:
        """directory: of the tokenizer. vocabulary: rows of the model's embedding.

        The reward tokens are added when the tokenizer lacks them, in the order in which training added them.
        Raises UserError when the tokenizer is not the model's.
        """
        try:
            self._tokenizer = Qwen2Tokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"videoalign.model_path: the tokenizer in {directory} cannot be read "
                f"({first_line(error)}); copy it again"
            ) from None
        self._tokenizer.add_tokens(
            [AddedToken(token, special=True, normalized=False) for token in REWARD_TOKENS],
            special_tokens=True,
        )
        self._template = template
        self._video = self._id(VIDEO_TOKEN)
        self._reward = [self._id(token) for token in REWARD_TOKENS]
        if self._video != video_token_id or max(self._reward) >= vocabulary:
            raise UserError(
                f"videoalign.model_path: the tokenizer in {directory} has {VIDEO_TOKEN} at {self._video} and "
                f"{REWARD_TOKENS[-1]} at {self._reward[-1]}, the model has the former at {video_token_id} "
                f"and {vocabulary} tokens; use the tokenizer of this checkpoint"
            )

    def write(self, samples: Sequence[Sample], visual_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids (N, L) int64, padded on the right, and the positions of the reward tokens (N, 3).

        visual_tokens: how many each video has. Raises UserError when a prompt holds one of the tokens.
        """
        texts = [question(self._template, sample.prompt) for sample in samples]
        rows: list[list[int]] = []
        for sample, ids in zip(samples, self._tokenizer(texts)["input_ids"], strict=True):
            if any(ids.count(token) != 1 for token in (self._video, *self._reward)):
                raise UserError(
                    f"prompt of {sample.sample_id}: holds one of {VIDEO_TOKEN}, {', '.join(REWARD_TOKENS)}, "
                    "which VideoAlign reads its scores by; reword it"
                )
            at = ids.index(self._video)
            rows.append([*ids[:at], *[self._video] * visual_tokens, *ids[at + 1 :]])
        longest = max(len(row) for row in rows)
        padding = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
        reward_at = torch.tensor([[row.index(token) for token in self._reward] for row in rows])
        return ids, reward_at

    def _id(self, token: str) -> int:
        found = self._tokenizer.get_vocab().get(token)
        if found is None:
            raise UserError(
                f"videoalign.model_path: the tokenizer has no {token}; use the one of Qwen2-VL-2B-Instruct"
            )
        return found
