"""Bodies of the two generating endpoints, checked and tokenised: all that can be done before the engine is asked.

Pure but for the tokenizer, and thread-safe: large bodies are prepared in a worker thread.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from aserve.core.request import SamplingParams
from aserve.engine.generation import GenerationRequest
from aserve.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Unsupported
from aserve.server.ports import Renderer, Vocabulary
from aserve.server.prompts import Prompt, TemplateChoices, as_prompt_ids, chat_ids, completion_prompts
from aserve.server.sampling import ModelFacts, sampling_params, stop_strings, truncate_to, with_length
from aserve.server.schema import (
    ApplyTemplateRequest,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    convert,
    parse_json,
    unknown_fields,
)

F = TypeVar("F", bound=SamplingFields)

Fit = Callable[[int, int | None, int | None], int]
"""(prompt tokens, length that was sent, default) -> the length to use: ``Engine.fit``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Generic[F]):
    """fields: the body. unknown: names of its fields that we do not know. params: complete but for max_tokens.

    max_tokens: what the client sent, None where it sent nothing; max_tokens_param names the field it came in.
    """

    fields: F
    unknown: list[str]
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    n: int
    max_tokens: int | None
    max_tokens_param: str

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def request(
        self,
        request_id: str,
        fit: Fit,
        *,
        prompt_param: str,
        default_tokens: int | None = None,
        deadline_s: float | None = None,
        owner: str = "",
    ) -> GenerationRequest:
        """What the engine is to do, of the length that fits all prompts.

        fit: the engine's. prompt_param: the field to blame for a prompt that is too long. default_tokens: where no
        length was sent; None is all the room there is. Raises ContextLengthExceeded or InvalidRequest.
        """
        fields = self.fields
        return GenerationRequest(
            request_id=request_id,
            prompts=tuple(prompt.ids for prompt in self.prompts),
            params=with_length(self.params, self._fitting_length(fit, default_tokens, prompt_param)),
            n=self.n,
            seed=None if fields.seed is None else fields.seed & 0xFFFF_FFFF_FFFF_FFFF,
            stop=stop_strings(fields),
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            ignore_eos=bool(fields.ignore_eos),
            skip_special_tokens=fields.skip_special_tokens is not False,
            priority=fields.priority or 0,
            # Hits across keys would let one client time what another one's prompts begin with.
            cache_salt=f"{owner[:32]}:{fields.cache_salt or ''}" if owner else fields.cache_salt or "",
            deadline_s=deadline_s,
            owner=owner,
        )

    def _fitting_length(self, fit: Fit, default: int | None, prompt_param: str) -> int:
        try:
            return min(fit(len(prompt.ids), self.max_tokens, default) for prompt in self.prompts)
        except ContextLengthExceeded as error:
            error.param = self.max_tokens_param if error.param == "max_tokens" else prompt_param
            raise


class Preparer:
    """Turns bodies into Prepared for one model. Every fault is InvalidRequest or a child of it, or ModelNotFound."""

    def __init__(
        self,
        *,
        renderer: Renderer,
        tokenizer: Vocabulary,
        facts: ModelFacts,
        model_names: Collection[str],
        max_json_depth: int,
    ) -> None:
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.facts = facts
        self._model_names = frozenset(model_names)
        self.max_json_depth = max_json_depth

    def check_model(self, name: str | None) -> None:
        """No name is the model that is served."""
        if name is not None and name not in self._model_names:
            raise ModelNotFound(f"The model '{name[:128]}' is not served here.", param="model")

    def template_choices(self, fields: ChatRequest | ApplyTemplateRequest) -> TemplateChoices:
        return TemplateChoices.of(
            fields.messages,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            chat_template_kwargs=fields.chat_template_kwargs,
            reasoning_effort=fields.reasoning_effort,
        )

    def chat(self, body: bytes) -> Prepared[ChatRequest]:
        raw = parse_json(body, self.max_json_depth)
        fields = convert(raw, ChatRequest)
        self.check_model(fields.model)
        self._check_common(fields)
        if fields.top_logprobs and not fields.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        sent = fields.max_completion_tokens
        param = "max_tokens" if sent is None else "max_completion_tokens"
        sent = fields.max_tokens if sent is None else sent
        if sent == 0:
            raise InvalidRequest(f"'{param}' must be at least 1.", param=param)
        params = sampling_params(
            fields,
            self.facts,
            self.tokenizer,
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            prompt_logprobs=fields.prompt_logprobs,
        )
        ids = chat_ids(self.renderer, fields.messages, self.template_choices(fields))
        return Prepared(
            fields=fields,
            unknown=unknown_fields(raw, ChatRequest),
            prompts=(Prompt(ids=as_prompt_ids(ids, "messages", truncate_to(fields, self.facts))),),
            params=params,
            n=fields.n or 1,
            max_tokens=sent,
            max_tokens_param=param,
        )

    def completion(self, body: bytes) -> Prepared[CompletionRequest]:
        raw = parse_json(body, self.max_json_depth)
        fields = convert(raw, CompletionRequest)
        self.check_model(fields.model)
        self._check_common(fields)
        n = fields.n or 1
        if fields.best_of is not None and fields.best_of != n:
            raise Unsupported("'best_of' is supported only where it equals 'n'.", param="best_of")
        if fields.max_tokens == 0 and not fields.echo:
            raise InvalidRequest("'max_tokens' must be at least 1 unless 'echo' is true.", param="max_tokens")
        prompt_logprobs = fields.prompt_logprobs
        if fields.echo and fields.logprobs is not None:
            prompt_logprobs = max(fields.logprobs, prompt_logprobs or 0)
        params = sampling_params(
            fields, self.facts, self.tokenizer, logprobs=fields.logprobs, prompt_logprobs=prompt_logprobs
        )
        prompts = completion_prompts(
            self.renderer,
            fields.prompt,
            add_special_tokens=fields.add_special_tokens is not False,
            vocab_size=self.facts.vocab_size,
            max_prompts=self.facts.max_prompts,
            truncate_to=truncate_to(fields, self.facts),
        )
        if len(prompts) * n > self.facts.max_prompts:
            raise InvalidRequest(
                f"{len(prompts)} prompts times n = {n} exceed the {self.facts.max_prompts} that a request may have.",
                param="n",
            )
        return Prepared(
            fields=fields,
            unknown=unknown_fields(raw, CompletionRequest),
            prompts=prompts,
            params=params,
            n=n,
            max_tokens=fields.max_tokens,
            max_tokens_param="max_tokens",
        )

    def _check_common(self, fields: SamplingFields) -> None:
        if fields.stream_options is not None and not fields.stream:
            raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")
        if fields.prompt_logprobs is not None and fields.stream:
            raise Unsupported("'prompt_logprobs' is not supported for streams.", param="prompt_logprobs")
