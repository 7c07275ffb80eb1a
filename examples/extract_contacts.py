"""Extraction into pydantic models (instructor): cached instructions, and every answer matches the model.

pip install instructor; python extract_contacts.py [URL]
"""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

INSTRUCTIONS = "You read notes and write down who is meant, and how to reach them. Leave nothing out. " * 8
NOTES = [
    "At the fair I talked with Vera Hughes of Copper Hill; her number is 555-0142.",
    "Call Tom Baker in Northgate, 555-0199, about the roof.",
    "Lunch with Ida Novak (Lakeside). Phone: 555-0107.",
]


class Contact(BaseModel):
    """A person."""

    name: str = Field(max_length=40)
    town: str = Field(max_length=40)
    phone: str = Field(pattern=r"^555-[0-9]{4}$")


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Print the contacts and the prefix cache hits."""
    with OpenAI(base_url=url, api_key="none") as client:
        patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        name = client.models.list().data[0].id
        cached = prompt = 0
        for note in NOTES:
            messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": note}]
            contact, completion = patched.chat.completions.create_with_completion(
                model=name, response_model=Contact, messages=messages, max_tokens=80, temperature=0
            )
            print(contact)
            prompt += completion.usage.prompt_tokens
            cached += completion.usage.prompt_tokens_details.cached_tokens
        print(f"{len(NOTES)} calls: {cached} of {prompt} prompt tokens came from the cache")


if __name__ == "__main__":
    main(*sys.argv[1:])
