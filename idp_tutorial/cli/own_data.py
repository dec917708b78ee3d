"""The options of a command that describe the user's own table."""

import sys

from idp_tutorial.utils.checks import UserError

__all__ = ["register_table_from_options"]


def register_table_from_options(
    options: dict,  # options of a command, by name
    default_task: str = "questions",  # default of the command's option `task`
) -> str:  # the name of the task
    """Add the table that a command's options describe to `TASKS`, and print it to stderr."""
    from idp_tutorial.data.user_data import register_table_task

    names = ("text", "text2", "label", "format", "regression", "validation", "test")
    if not options.get("table") or options.get("data"):
        problem = "data is a folder of known tasks" if options.get("data") else "no table is given"
        raise UserError(
            f"{', '.join(names[:-1])} and {names[-1]} describe a table, but {problem}: "
            "pass a table too, such as tickets.csv with text=message and label=topic."
        )
    if options.get("task", default_task) != default_task:
        raise UserError(
            f"task={options['task']} and the table {options['table']} are two tasks: give one of "
            "them."
        )
    table_options = {name: options[name] for name in names if name in options}
    task, description = register_table_task(
        options["table"], **table_options, seed=options.get("split_seed", 0)
    )
    print(description, file=sys.stderr)
    return task.name
