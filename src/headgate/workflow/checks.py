"""What can be known to be missing before a run begins: variables, programs, keys, headers.

Rule: nothing is started or sent here. What an earlier step may yet make, such as a program in the
folder, is not asked for.
"""

from __future__ import annotations

from functools import lru_cache

from headgate.errors import InvalidSettingError, WorkflowError
from headgate.executors.command import check_variable, found_program, start_problem
from headgate.workflow.step_requests import Variables, check_header_name, model_headers, model_url
from headgate.workflow.workflow import CommandWork, HttpWork, ModelWork, Step, Workflow

MAX_REMEMBERED = 1_000


def check_steps(workflow: Workflow, variables: Variables) -> None:
    """Raise `InvalidSettingError` for what a step needs and does not find."""
    asked: set[str] = set()
    for step in workflow.steps:
        setting = f"steps.{step.id}"
        match step.work:
            case CommandWork():
                _check_command(step, step.work, workflow, variables)
            case HttpWork(url=url, headers=headers):
                variables.check(url, f"{setting}.http.url")
                for name, text in headers.items():
                    check_header_name(name, f"{setting}.http.headers.{name}")
                    variables.check(text, f"{setting}.http.headers.{name}")
            case ModelWork(endpoint=endpoint) if endpoint not in asked:
                asked.add(endpoint)
                _check_endpoint(endpoint, setting, workflow, variables)


def in_file(error: InvalidSettingError, workflow: Workflow) -> InvalidSettingError | WorkflowError:
    """Return an error as one of the file, with its line and key, if it is about what stands there.

    Executors and the like name what they are for as `steps.ID.…`; a file has steps in an order.
    """
    kind, _, rest = error.field.partition(".")
    if kind == "steps":
        step_id, _, key = rest.partition(".")
        for index, step in enumerate(workflow.steps):
            if step.id == step_id:
                return _located(error, workflow, step.line, f"steps[{index}].{key}")
    if kind == "config":
        return _located(error, workflow, _endpoint_line(error.field, workflow), error.field)
    return error


def _located(
    error: InvalidSettingError, workflow: Workflow, line: int | None, key: str
) -> WorkflowError:
    return WorkflowError(workflow.file, error.problem, line=line, key=key)


def _endpoint_line(field: str, workflow: Workflow) -> int | None:
    """Return the line of an endpoint, or of the first step that asks one that is always there."""
    for name, endpoint in workflow.endpoints.items():
        if field.startswith(f"config.endpoints.{name}."):
            asking = (one.line for one in workflow.steps
                      if isinstance(one.work, ModelWork) and one.work.endpoint == name)  # fmt: skip
            return next(asking, None) if endpoint.line is None else endpoint.line
    return None


def _check_command(step: Step, work: CommandWork, workflow: Workflow, variables: Variables) -> None:
    setting = f"steps.{step.id}"
    for text in work.command:
        variables.check(text, f"{setting}.command")
    for name, text in work.env.items():
        check_variable(name, setting=f"{setting}.env.{name}")
        variables.check(text, f"{setting}.env.{name}")
    if work.cwd is not None:
        variables.check(work.cwd, f"{setting}.cwd")
    _check_program(step, work, workflow, variables)


def _check_program(step: Step, work: CommandWork, workflow: Workflow, variables: Variables) -> None:
    setting = f"steps.{step.id}.command"
    name = variables.fixed(work.command[0], setting)
    inner = "" if work.cwd is None else variables.fixed(work.cwd, f"steps.{step.id}.cwd")
    # Another PATH may be filled in later; a step before this one may make a file or a folder.
    is_known = "PATH" not in work.env and not (step.depends_on and ("/" in (name or "") or inner))
    if name is None or inner is None or not is_known:
        return
    cwd = str(workflow.folder / inner)
    try:
        _find(name, cwd, variables.environ.get("PATH"))
    except OSError as error:
        problem, _ = start_problem(error, name, cwd)
        advice = "install it, or correct the name"
        raise InvalidSettingError(setting, f"{variables.cleaned(problem)}; {advice}") from None


@lru_cache(maxsize=MAX_REMEMBERED)
def _find(name: str, cwd: str, search: str | None) -> str:
    """Look for a program; ten thousand steps mostly run the same few."""
    return found_program(name, cwd, {} if search is None else {"PATH": search})


def _check_endpoint(name: str, setting: str, workflow: Workflow, variables: Variables) -> None:
    endpoint = workflow.endpoints.get(name)
    if endpoint is None:
        where = f"{setting}.endpoint"
        problem = f"there is no endpoint {name!r}; add it to config.endpoints"
        raise InvalidSettingError(where, problem)
    url = model_url(endpoint, variables)
    if not url.startswith(("http://", "https://")):
        where = f"config.endpoints.{name}.url"
        raise InvalidSettingError(where, "must begin with http:// or https://")
    model_headers(endpoint, variables)
