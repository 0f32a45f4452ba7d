"""What pydantic expected of a value, in the words of this project's messages."""

from pydantic_core import ErrorDetails


def expectation(error: ErrorDetails) -> str:
    """What was expected where an error was found: "expected ..." with it is a sentence a user can act on."""
    context = {name: f"{x:g}" if isinstance(x, float) else x for name, x in error.get("ctx", {}).items()}
    match error["type"].removesuffix("_parsing").removesuffix("_type"):
        case "missing":
            return "an entry"
        case "literal_error":
            return f"one of {context['expected'].replace(' or ', ', ')}".replace("'", "")
        case "greater_than_equal":
            return f"{context['ge']} or more"
        case "greater_than":
            return f"more than {context['gt']}"
        case "less_than_equal":
            return f"at most {context['le']}"
        case "finite_number":
            return "a finite number"
        case "int" | "int_from_float":
            return "a whole number"
        case "float":
            return "a number"
        case "bool":
            return "true or false"
        case "string" | "string_too_short" | "string_pattern_mismatch":
            return "text"
        case "dict" | "model":
            return "a map"
        case "list" | "tuple":
            return "a list"
        case "too_short":
            return f"{context['min_length']} or more entries"
        case "too_long":
            return f"at most {context['max_length']} entries"
        case "byte_size" | "byte_size_unit":
            return "bytes, or a size such as 8GiB"
    return error["msg"]
