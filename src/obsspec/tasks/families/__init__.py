"""The families of generated tasks, by name."""

from obsspec.tasks.families import (
    archive,
    c_program,
    checksum,
    csv_table,
    database,
    file_tree,
    git_history,
    json_records,
    logs,
    makefile,
    permissions,
    python_bug,
    replace,
    schedule,
    service,
    text,
)
from obsspec.tasks.problem import Family

FAMILIES: dict[str, Family] = {
    "archive": archive.generate,
    "c_program": c_program.generate,
    "checksum": checksum.generate,
    "csv_table": csv_table.generate,
    "database": database.generate,
    "file_tree": file_tree.generate,
    "git_history": git_history.generate,
    "json_records": json_records.generate,
    "logs": logs.generate,
    "makefile": makefile.generate,
    "permissions": permissions.generate,
    "python_bug": python_bug.generate,
    "replace": replace.generate,
    "schedule": schedule.generate,
    "service": service.generate,
    "text": text.generate,
}
