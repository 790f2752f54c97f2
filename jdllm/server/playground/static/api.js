// The server's public API: JSON, streams of events, and the key.

let key = sessionStorage.getItem("jdllm-key") || "";

export function setKey(text) {
  key = text.trim();
  sessionStorage.setItem("jdllm-key", key);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function failed(answer) {
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Not JSON: the status says all there is.
  }
  return new ApiError(answer.status, message);
}

export async function get(path) {
  const answer = await fetch(path, { headers: headers({}) });
  if (!answer.ok) throw await failed(answer);
  return answer.json();
}

function send(path, body, signal) {
  return fetch(path, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
}

export async function post(path, body, signal) {
  const answer = await send(path, body, signal);
  if (!answer.ok) throw await failed(answer);
  return answer.json();
}

// Yields the objects of a stream's `data:` lines; ends at [DONE] or throws its error.
export async function* stream(path, body, signal) {
  const answer = await send(path, { ...body, stream: true }, signal);
  if (!answer.ok) throw await failed(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const text = line.slice(6);
      if (text === "[DONE]") return;
      const found = JSON.parse(text);
      if (found.error) throw new ApiError(answer.status, found.error.message);
      yield found;
    }
  }
}
