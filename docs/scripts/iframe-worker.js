// Search from disk: browsers start no worker from a page that is read from a file. There, an invisible frame runs the
// script of the search instead; the theme knows it by the name `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.scope = new Promise((resolve, reject) => {
        this.frame.addEventListener("load", () => {
          const scope = this.frame.contentWindow
          scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = scope.document.createElement("script")
          script.src = new URL(address, location.href)
          script.addEventListener("load", () => resolve(scope))
          script.addEventListener("error", reject)
          scope.document.head.append(script)
        }, { once: true })
      })
      document.body.append(this.frame)
    }

    postMessage(data) {
      this.scope.then(scope => scope.dispatchEvent(new scope.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
