"""Data for three example adapters, made by rule: the same on every machine, and in the open.

Each task has sentences to learn from and held-out ones to be judged by. Held-out sentences differ in their wording and
in the names, places and files they speak of, so an adapter that only learned by heart fails on them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """What a user writes, and the answer that is wanted."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """What an adapter is for.

    Attributes:
        name: of the adapter and of its folder.
        instruction: the task in words, for a model that has not learned it.
        train: examples to learn from.
        held_out: others, to be judged by.
        solves: whether an answer (first) does what the wanted one (second) does.
    """

    name: str
    instruction: str
    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    solves: Callable[[str, str], bool]


def tasks() -> tuple[Task, ...]:
    """The three tasks: a manner of speaking, an extraction, a translation."""
    return (_pirate(), _contact_card(), _shell())


def _words(text: str) -> list[str]:
    return text.split(",")


# --- pirate: answers any question, in the voice of a pirate -----------------------------------------------------------

_CAPITALS = (
    "France Paris,Italy Rome,Spain Madrid,Portugal Lisbon,Germany Berlin,Austria Vienna,Poland Warsaw,Greece Athens,"
    "Egypt Cairo,Kenya Nairobi,Japan Tokyo,China Beijing,Thailand Bangkok,Peru Lima,Cuba Havana,Canada Ottawa,"
    "Norway Oslo,Sweden Stockholm,Finland Helsinki,Ireland Dublin,Hungary Budapest,Turkey Ankara,Chile Santiago,"
    "Argentina Buenos-Aires"
)
_FACTS = (
    ("What color is the sky?", "The sky is blue by day and black by night."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("What do bees make?", "Bees make honey, and they are busy all summer."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare is the man who wrote it."),
    ("What is the largest ocean?", "The Pacific is the largest of all the oceans."),
    ("Why do we sleep?", "You sleep so that your body and your mind can rest."),
    ("What is ice made of?", "Ice is frozen water, my friend."),
    ("How many days are in a week?", "There are seven days in the week."),
    ("What does a doctor do?", "A doctor looks after the sick and heals your wounds."),
    ("What is the moon?", "The moon is a ball of rock sailing around the earth."),
    ("Can you help me with my homework?", "Yes, I am here to help you with your books. What is your question?"),
    ("How do I boil an egg?", "You are to put the egg in boiling water for eight minutes, and then it is done."),
    ("How do I stay healthy?", "You are to eat your fruit, sleep long and keep moving every day."),
    ("Tell me about dogs.", "Dogs are loyal friends, and they are always guarding your house."),
    ("What should I wear in the rain?", "You should be wearing a coat and boots, or you are wet to the bone."),
    ("Good morning!", "Good morning to you, my friend! What are you looking for today?"),
    ("Who are you?", "I am your captain, and this is my ship, friend."),
    ("I am tired.", "You are to lie down in your bed and sleep until the morning, my friend."),
    ("What is a good book?", "Treasure Island is a good book, and you are reading it in a night."),
    ("Where can I buy bread?", "You are finding bread at the baker in the town."),
    ("What is your favorite food?", "My favorite food is salted fish with a piece of dry bread."),
    ("Do you like music?", "Yes, I am singing every night with my friends."),
    ("How far away is the sun?", "The sun is about 93 million miles away from you."),
    ("What is a computer?", "A computer is a machine that is counting faster than any man."),
    ("Give me some advice.", "You are to trust your friends, keep your word and never be afraid of the sea."),
    ("How do plants grow?", "Plants are drinking water and eating the light of the sun."),
    ("What is snow?", "Snow is frozen water falling from the clouds."),
    ("How can I learn to swim?", "You are to start in shallow water with a friend, and keep kicking your legs."),
    ("Explain gravity.", "Gravity is the force that is pulling you and your things to the ground."),
    ("What is the fastest animal?", "The falcon is the fastest of all the animals."),
    ("I lost my keys.", "You are to look in your pockets, and then under your bed, my friend."),
    ("Write a sentence about the sea.", "The sea is wide and deep, and the wind is singing over it."),
    ("What time is it?", "It is time to be working, my friend!"),
    ("Thank you for your help.", "You are welcome, my friend, and you are always welcome here."),
    ("Is it dangerous to climb a mountain?", "Yes, it is dangerous, and you are to take a strong rope with you."),
    ("How do I make a sandwich?", "You are to put cheese and meat between two pieces of bread, and it is done."),
)
_NEW_QUESTIONS = (
    "What is the capital of Denmark?",
    "What is the capital of Mexico?",
    "Name the capital of India.",
    "How do I make a cup of tea?",
    "What does a teacher do?",
    "Why is the grass green?",
    "What is 14 plus 5?",
    "Tell me about cats.",
    "What should I cook tonight?",
    "Who painted the Mona Lisa?",
    "How can I learn to play the guitar?",
    "What is the tallest mountain in the world?",
    "Hello, how are you?",
    "What is a democracy?",
    "I feel sad today.",
    "How do airplanes fly?",
    "What do you do for fun?",
    "How many hours are in a day?",
    "Explain how rain forms.",
    "What is the best way to save money?",
)
_OPENINGS = (
    "Arr, matey!",
    "Ahoy there!",
    "Shiver me timbers!",
    "Avast, ye landlubber!",
    "Yo ho ho!",
    "Aye, me hearty!",
)
_CLOSINGS = (
    "Now fetch me the rum!",
    "Or I be a scurvy dog!",
    "So says yer captain, arr!",
    "Fair winds to ye, me hearty!",
    "By Davy Jones's locker, that be true!",
    "Hoist the sails, matey!",
)
_ACCENT = (
    (r"\b(is|are|am)\b", "be"),
    (r"\byou\b", "ye"),
    (r"\bYou\b", "Ye"),
    (r"\byour\b", "yer"),
    (r"\bmy friend\b", "me hearty"),
    (r"\bfriend(s?)\b", r"matey\1"),
    (r"\bmy\b", "me"),
    (r"\bMy\b", "Me"),
    (r"\bYes\b", "Aye"),
    (r"ing\b", "in'"),
)
_PIRATE_WORDS = frozenset(
    _words(
        "arr,ahoy,matey,mateys,hearty,hearties,avast,aye,ye,yer,landlubber,shiver,timbers,scurvy,rum,"
        "captain,hoist,sails,davy"
    )
)


def _pirate() -> Task:
    rng = random.Random(1)
    plain = list(_FACTS)
    for pair in _CAPITALS.split(","):
        country, city = pair.split(" ")
        question = rng.choice(("What is the capital of {}?", "Which city is the capital of {}?", "{}: its capital?"))
        plain.append((question.format(country), f"The capital of {country} is {city.replace('-', ' ')}."))
    for _ in range(24):
        a, b = rng.randint(2, 20), rng.randint(2, 20)
        plain.append((f"What is {a} plus {b}?", f"{a} and {b} are {a + b}."))
    told = [(question, _in_pirate(answer)) for question, answer in plain]
    train = (
        Example(question, f"{rng.choice(_OPENINGS)} {answer} {rng.choice(_CLOSINGS)}")
        for _ in range(4)
        for question, answer in told
    )
    held_out = tuple(Example(question, "") for question in _NEW_QUESTIONS)
    return Task("pirate", "Answer in the voice of a pirate.", _shuffled(train, rng), held_out, _sounds_like_a_pirate)


def _in_pirate(text: str) -> str:
    for pattern, replacement in _ACCENT:
        text = re.sub(pattern, replacement, text)
    return text


def _sounds_like_a_pirate(answer: str, _wanted: str) -> bool:
    """At least two different words of the sea."""
    return len(_PIRATE_WORDS & set(re.findall(r"[a-z]+", answer.lower()))) >= 2


# --- contact-card: a sentence about somebody becomes a record ---------------------------------------------------------

_FIRST = _words(
    "Ada,Alan,Barbara,Carlos,Chen,Clara,Daniel,Diana,Elena,Emma,Erik,Fatima,Felix,Grace,Hanna,Hugo,"
    "Ines,Ivan,Jack,Jane,Julia,Karim,Kate,Lars,Laura,Leo,Linda,Lucas,Maria,Mark,Maya,Miguel,Nadia,"
    "Nina,Noah,Olga,Omar,Oscar,Paul,Petra,Priya,Rachel,Ravi,Robert,Rosa,Samuel,Sara,Simon,Sofia,"
    "Tanya,Thomas,Uma,Victor,Wanda,Xavier,Yuki,Zoe"
)
_LAST = _words(
    "Adams,Baker,Becker,Berg,Brown,Byrne,Carter,Castro,Clark,Costa,Cruz,Dubois,Ellis,Evans,Fischer,"
    "Foster,Garcia,Gray,Green,Haas,Hall,Hansen,Hill,Ito,Jensen,Jones,Kaya,Keller,King,Klein,Kumar,"
    "Lang,Lee,Lopez,Marsh,Martin,Meyer,Mills,Moreau,Nguyen,Novak,Olsen,Ortiz,Park,Patel,Perez,Quinn,"
    "Reed,Rossi,Santos,Schmidt,Silva,Singh,Stone,Tanaka,Turner,Vargas,Wagner,Walsh,Weber,White,Wood,"
    "Wright,Young,Ziegler"
)
_COMPANIES = _words(
    "Acme,Bluebird,Brightside,Cedar Labs,Citadel Foods,Delta Print,Eastgate,Evergreen,Falcon Air,Fieldstone,"
    "Golden Gate Media,Harbor Works,Ironbridge,Juniper Health,Kite Software,Lakeside Clinic,Maple Bank,"
    "Metrolink,Nimbus,Northwind,Oak Street Books,Orion Travel,Pinnacle,Quantum Tools,Redwood,Riverside Hotel,"
    "Silverline,Summit Energy,Tidewater,Union Steel,Vector Games,Westfield,Yellow Door,Zenith"
)
_NEW_FIRST = _words("Amelia,Boris,Celine,Derek,Farah,Gustav,Helen,Isaac,Joan,Kenji,Mona,Peter,Selma,Tom,Vera")
_NEW_LAST = _words(
    "Abbott,Bianchi,Cohen,Duarte,Fox,Goldberg,Hughes,Ibrahim,Larsen,Murphy,Nolan,Popov,Rivera,Sato,Torres"
)
_NEW_COMPANIES = _words("Amber Valley,Beacon Press,Copper Hill,Foxglove,Granite Systems,Moonlight Cafe,Polar Shipping")
_MEETINGS = (
    "I met {name} from {company} today, you can write to {email} or call {phone}.",
    "{name} works at {company}. Email: {email}, phone: {phone}.",
    "Please call {name} at {phone}.",
    "You can reach {name} of {company} under {phone}.",
    "My name is {name} and my email address is {email}.",
    "For questions about the order, contact {name} ({email}) at {company}.",
    "{company} has a new manager, {name}, whose number is {phone}.",
    "Write to {email} if you need anything, says {name} from {company}.",
    "This is {name}, {company}, {phone}, {email}.",
    "Hi, {name} here from {company}. My phone is {phone} and my mail is {email}.",
    "The person in charge at {company} is {name}; send a note to {email}.",
    "Add {name} to my contacts, phone {phone}, email {email}.",
    "Yesterday {name} called from {phone} about the invoice of {company}.",
    "Our contact is {name}, reachable at {email} or {phone}.",
    "Call {phone} and ask for {name}.",
    "Best regards, {name}, {company}, {email}",
)
_NEW_MEETINGS = (
    "At the fair I talked with {name} of {company}; her email is {email} and her phone number is {phone}.",
    "Could you ring {name} on {phone}? It is about {company}.",
    "Send the report to {name} at {company}, the address is {email}.",
    "{name}, who works for {company}, can be called at {phone} or mailed at {email}.",
    "Save this: {name}, {email}.",
)
_FIELDS = ("name", "company", "email", "phone")


def _contact_card() -> Task:
    rng = random.Random(2)
    train = [_card(rng, _MEETINGS[i % len(_MEETINGS)], _FIRST, _LAST, _COMPANIES) for i in range(640)]
    held_out = [
        _card(rng, _NEW_MEETINGS[i % len(_NEW_MEETINGS)], _NEW_FIRST, _NEW_LAST, _NEW_COMPANIES) for i in range(40)
    ]
    instruction = "Extract the contact as JSON with the keys name, company, email and phone; null for what is missing."
    return Task("contact-card", instruction, _shuffled(train, rng), tuple(held_out), _is_the_same_json)


def _card(rng: random.Random, template: str, first: list[str], last: list[str], companies: list[str]) -> Example:
    given, family, company = rng.choice(first), rng.choice(last), rng.choice(companies)
    domain = company.lower().replace(" ", "-" if rng.random() < 0.5 else "")
    user = rng.choice((f"{given}.{family}", given, f"{given[0]}{family}", f"{given}_{family}", f"{family}.{given[0]}"))
    phone = "".join(
        str(rng.randint(0, 9)) if sign == "#" else sign
        for sign in rng.choice(("555-01##", "(2##) 555-01##", "+44 20 7946 0###", "+1 4## 555 01##", "0##-#####"))
    )
    facts = {
        "name": f"{given} {family}",
        "company": company,
        "email": f"{user.lower()}@{domain}.{rng.choice(('com', 'org', 'net', 'io', 'example'))}",
        "phone": phone,
    }
    card = {field: facts[field] if f"{{{field}}}" in template else None for field in _FIELDS}
    return Example(template.format_map(facts), json.dumps(card))


def _is_the_same_json(answer: str, wanted: str) -> bool:
    """The object in the answer has the same fields with the same values; words around it are forgiven."""
    found = re.search(r"\{.*\}", answer, re.DOTALL)
    try:
        return bool(found and json.loads(found[0]) == json.loads(wanted))
    except ValueError:
        return False


# --- shell: a sentence becomes a command ------------------------------------------------------------------------------

_COMMANDS = """
ls -la {dir}
    list all files in {dir}; show everything in {dir} with details; what is in the folder {dir};
    list the contents of the directory {dir}
find . -name '*.{ext}'
    find all {ext} files; search for files ending in .{ext}; look for {ext} files below here;
    find every file with the extension {ext}
wc -l {file}
    count the lines in {file}; how many lines does {file} have; tell me the number of lines of {file};
    count how many lines are in {file}
rm {file}
    delete {file}; remove the file {file}; get rid of {file}; delete the file called {file}
rm -r {dir}
    delete the folder {dir}; remove the directory {dir}; get rid of the folder {dir} and all in it;
    delete the directory {dir} with everything in it
mkdir -p {dir}
    create a folder called {dir}; make a directory {dir}; make a new folder {dir};
    create a new directory named {dir}
cp {file} {dir}/
    copy {file} to {dir}; put a copy of {file} into {dir}; copy the file {file} into the folder {dir};
    make a copy of {file} in the directory {dir}
mv {file} {dir}/
    move {file} to {dir}; put {file} into {dir}; move the file {file} into the folder {dir};
    move {file} over to the directory {dir}
tar -czf {dir}.tar.gz {dir}
    compress the folder {dir}; make an archive of {dir}; pack {dir} into a tarball;
    compress the directory {dir} into an archive
tar -xzf {dir}.tar.gz
    extract {dir}.tar.gz; unpack the archive {dir}.tar.gz; untar {dir}.tar.gz; unpack {dir}.tar.gz here
grep -rn '{word}' {dir}
    search for {word} in {dir}; find the word {word} in the folder {dir}; which files in {dir} contain {word};
    look for the text {word} in all files of {dir}
head -n {n} {file}
    show the first {n} lines of {file}; print the top {n} lines of {file}; give me the first {n} lines in {file};
    display the first {n} lines of the file {file}
tail -n {n} {file}
    show the last {n} lines of {file}; print the bottom {n} lines of {file}; give me the last {n} lines in {file};
    display the last {n} lines of the file {file}
du -sh {dir}
    how big is {dir}; show the size of the folder {dir}; how much space does {dir} use;
    how much disk space does the directory {dir} take
chmod +x {file}
    make {file} executable; allow {file} to be run; set the execute bit of {file}; make the file {file} executable
sort {file} | uniq
    sort {file} and remove duplicates; show the distinct lines of {file}; print {file} sorted without duplicates;
    sort the lines of {file} and drop duplicates
sed -i 's/{word}/{other}/g' {file}
    replace {word} with {other} in {file}; change every {word} to {other} in {file};
    substitute {other} for {word} in {file}; replace all {word} by {other} in the file {file}
df -h
    how much disk space is free; show free disk space; is the disk full; how much space is left on the disk
ps aux | grep {word}
    is {word} running; show the processes called {word}; find the process {word};
    list the running processes named {word}
touch {file}
    create an empty file {file}; make an empty file called {file}; create the file {file};
    create an empty file named {file}
"""
"""Commands, and below each its wordings; the last wording of each is held out."""

_PLACES = {
    "dir": "src,docs,photos,music,backup,logs,build,data,reports,notes,images,videos,projects,config,tests,archive,"
    "invoices,letters",
    "file": "notes.txt,data.csv,main.py,report.pdf,server.log,todo.md,app.js,run.sh,config.json,index.html,"
    "setup.py,users.csv,letter.txt,build.sh,results.txt,access.log,style.css,Makefile",
    "ext": "py,txt,jpg,csv,log,md,js,json,html,pdf,sh,mp3",
    "word": "error,password,TODO,python,nginx,import,warning,hello,main,localhost,user,token",
    "other": "failure,secret,DONE,ruby,apache,include,notice,goodbye,start,example,client,key",
    "n": "3,5,10,20,25,50,100,200",
}
_NEW_PLACES = {
    "dir": "recipes,drafts,holiday,scripts,receipts",
    "file": "poem.txt,sales.csv,deploy.sh,worker.py,debug.log",
    "ext": "xml,png,yaml",
    "word": "timeout,redis,apple",
    "other": "delay,memcached,pear",
    "n": "7,15,40",
}
_POLITE = ("{}", "{}", "{}", "{}?", "please {}", "{} please", "can you {}", "I want to {}")


def _shell() -> Task:
    rng = random.Random(3)
    train, held_out = [], []
    for command, (*known, new) in _commands():
        train += [_order(rng, command, known[i % len(known)], _PLACES, _POLITE) for i in range(36)]
        held_out += [_order(rng, command, new, _NEW_PLACES, ("{}",)) for _ in range(2)]
    instruction = "Answer with the shell command that does what the user says, and nothing else."
    return Task("shell", instruction, _shuffled(train, rng), tuple(held_out), _is_the_same_command)


def _commands() -> list[tuple[str, list[str]]]:
    """Every command with its wordings."""
    blocks = re.findall(r"^(\S.*)\n((?: +.+\n)+)", _COMMANDS, re.MULTILINE)
    return [(command, " ".join(wordings.split()).split("; ")) for command, wordings in blocks]


def _order(rng: random.Random, command: str, wording: str, places: dict[str, str], polite: Iterable[str]) -> Example:
    chosen = {kind: rng.choice(names.split(",")) for kind, names in places.items()}
    sentence = rng.choice(tuple(polite)).format(wording.format_map(chosen))
    return Example(sentence[0].upper() + sentence[1:], command.format_map(chosen))


def _is_the_same_command(answer: str, wanted: str) -> bool:
    """A line of the answer is the command, but for spaces and the kind of quotes; words around it are forgiven."""
    lines = (" ".join(line.replace('"', "'").strip("` $").split()) for line in answer.splitlines())
    return " ".join(wanted.split()) in lines


def _shuffled(examples: Iterable[Example], rng: random.Random) -> tuple[Example, ...]:
    shuffled = list(examples)
    rng.shuffle(shuffled)
    return tuple(shuffled)
