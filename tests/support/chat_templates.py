"""Chat templates in the manner of published ones, for tests; each uses other parts of Jinja."""

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501

# Tools and their calls as JSON; arguments are objects.
TOOLS = """\
{%- set ns = namespace(last=messages|length - 1, open=false) %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- if not ns.open and message.role == 'user' %}
        {%- set ns.open = true %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- set function = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ function.name ~ '", "arguments": ' }}
            {{- function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {%- set content = '<think>' ~ message.reasoning_content ~ '</think>' ~ content %}
        {%- endif %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# A header with the date, indented JSON, a macro, loop controls and the generation tag.
HEADERS = """\
{{ bos_token }}{% macro header(role) %}<|start|>{{ role }}<|end|>

{% endmacro %}
{% set date = date if date is defined else strftime_now('%d %b %Y') %}
{{ header('system') }}Today is {{ date }}.
{% if tools is not none %}
{{ tools | tojson(indent=4) }}
{% endif %}
{% for message in messages if message.content is string %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% if loop.index0 > 50 %}{% break %}{% endif %}
{{ header(message.role) }}{% generation %}{{ message.content | trim | replace('<|eot|>', '') }}{% endgeneration %}<|eot|>
{% endfor %}
{% if add_generation_prompt %}
{{ header('assistant') }}
{%- endif %}
"""  # noqa: E501

# Roles that must alternate, other names for them, arithmetic, filters, string methods.
ALTERNATING = """\
{% if messages[0]['role'] == 'system' %}
{% set first = messages[0]['content'] | trim + '\\n\\n' %}
{% set rest = messages[1:] %}
{% else %}
{% set first = '' %}{% set rest = messages %}
{% endif %}
{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{% endif %}
{% set role = {'assistant': 'model'}.get(message['role'], message['role']) %}
{{ '<start_of_turn>%s\\n' % role + (first if loop.first else '') + message['content'].strip() }}<end_of_turn>
{{ '-' * 3 }}{{ '{:>4}|{}'.format(loop.index, message.content | length) }}{{ ['a', 1] | join(',') }}
{% endfor %}
{{ messages | map(attribute='role') | unique | list | tojson }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'x' | upper | center(7) }}{{ 'a\\nb' | indent(2) }}
{{ dict(a=1, **{'b': 2}) }}{{ 7 // 2 }} {{ 2 ** 5 }} {{ 1.5 | round }} {{ [3, 1] | sort }} {{ '&<' }}{{ '&<' | e }}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""  # noqa: E501

# Calls whose arguments are JSON text, added with `+`; results by their id; reads names.
TEXT_ARGUMENTS = """\
{% for message in messages %}
{% if message.role == 'tool' %}
[RESULT {{ message.tool_call_id }}]{{ message.content }}[/RESULT]
{% elif message.tool_calls is defined %}
{% for call in message.tool_calls %}
{{ '[CALL ' + call.id + ']' + call.function.name + '(' + call.function.arguments + ')' }}
{% endfor %}
{% else %}
[{{ message.role }}{{ ' ' + message.name if message.name is defined else '' }}]{{ message.content }}
{% endif %}
{% endfor %}
"""

ALL = {
    "chatml": CHATML,
    "tools": TOOLS,
    "headers": HEADERS,
    "alternating": ALTERNATING,
    "text-arguments": TEXT_ARGUMENTS,
}
