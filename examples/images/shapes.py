"""Two tasks that are seen: say the colour of a square, at once or after a closer look."""

import random

from PIL import Image, ImageDraw

from agentrl.env import Action, Environment, Task, ToolCall, tool
from agentrl.images import image_part

COLOURS = {"red": "#d22", "green": "#2a2", "blue": "#22d", "yellow": "#dd2"}


def picture(size, square, colour):
    """A square on grey: its left and upper edge, and its width, in pixels."""
    image = Image.new("RGB", (size, size), "#888")
    x, y, width = square
    ImageDraw.Draw(image).rectangle((x, y, x + width - 1, y + width - 1), colour)
    return image


def shown(image, text):
    return [image_part(image), {"type": "text", "text": text}]


class Colour(Environment):
    """One picture of 32 x 32 pixels, one word."""

    def splits(self):
        return {"train": 1000, "test": 100}

    def get(self, split, index):
        draw = random.Random(f"{split}-{index}")
        width = draw.randrange(8, 15)
        square = draw.randrange(33 - width), draw.randrange(33 - width), width
        colour = draw.choice(list(COLOURS))
        content = shown(picture(32, square, COLOURS[colour]), "Which colour?")
        return Task(f"{split}-{index}", [{"role": "user", "content": content}], reference=colour)

    def on_text(self, text):
        self.finish(float(text.strip() == self.task.reference))

    def oracle(self):
        return [Action(self.task.reference)]


def quarter(answer, x, y):
    """A quarter of the picture of `Zoom`, in colour, as a message's content."""
    whole = picture(64, answer["square"], COLOURS[answer["colour"]])
    return [image_part(whole.crop((32 * x, 32 * y, 32 * x + 32, 32 * y + 32)))]


class Zoom(Environment):
    """A thumbnail without colours says where the square is; a quarter of the picture says which
    colour it has. To look at the right quarter earns 0.3, and the colour, once seen, the rest."""

    def splits(self):
        return {"train": 1000, "test": 100}

    def get(self, split, index):
        draw = random.Random(f"{split}-{index}")
        x, y, width = draw.randrange(2), draw.randrange(2), draw.randrange(12, 21)
        square = *(32 * at + draw.randrange(33 - width) for at in (x, y)), width
        thumbnail = picture(64, square, "black").resize((32, 32))
        prompt = [{"role": "user", "content": shown(thumbnail, "Zoom. Which colour?")}]
        answer = {"square": square, "colour": draw.choice(list(COLOURS)), "x": x, "y": y}
        return Task(f"{split}-{index}", prompt, reference=answer)

    @tool
    def zoom(self, x: int, y: int):
        """Show a quarter of the picture.

        Args:
            x: 0 is the left half, 1 the right one.
            y: 0 is the upper half, 1 the lower one.
        """
        answer = self.task.reference
        self.metrics["found"] = float((x, y) == (answer["x"], answer["y"]))
        return quarter(answer, x, y)

    def on_text(self, text):
        is_right = text.strip() == self.task.reference["colour"]
        self.finish(self.metrics.get("found", 0.0) * (0.3 + 0.7 * is_right))

    def oracle(self):
        where = {name: self.task.reference[name] for name in ("x", "y")}
        return [
            Action(tool_calls=(ToolCall("c", "zoom", where),)),
            Action(self.task.reference["colour"]),
        ]
